; setup.exe: installs Tandem for the person who starts it, without an administrator.
;
; makensis gets: VERSION, VERSION_NUMBERS (1.2.3.0), TREE (the folder to install), OUT (setup.exe),
; KIB (what is installed), LONGEST (characters of the longest path below the folder), ICON,
; COMPRESSOR (lzma; zlib is quick, for tries).
;
; setup.exe /S [/D=FOLDER]        installs without questions; exit status 2: Windows is too old,
;                                 3: Tandem is in use, 4: the folder holds something else,
;                                 5: it is installed but does not start
; uninstall.exe /S [/ENGINE]      removes it; /ENGINE also what the engine has fetched

Target amd64-unicode
SetCompressor /SOLID ${COMPRESSOR}
!if ${COMPRESSOR} == lzma
    SetCompressorDictSize 64
!endif
SetDateSave on
RequestExecutionLevel user
ManifestSupportedOS Win10
ManifestLongPathAware true
ManifestDPIAware true

!include MUI2.nsh
!include FileFunc.nsh
!include LogicLib.nsh
!include Sections.nsh
!include WinVer.nsh

!define UNINSTALL_KEY "Software\Microsoft\Windows\CurrentVersion\Uninstall\Tandem"
!define OWN_KEY "Software\Tandem"
!define CLASSES "Software\Classes"
!define PROG_ID "Tandem.gguf"
!define USUAL_LONGEST 259 ; characters of a path, unless an administrator allows more
!define LEAST_BUILD 17763 ; Windows 10 1809, which Qt needs
!define RUNTIME_URL "https://aka.ms/vs/17/release/vc_redist.x64.exe"

Name "Tandem"
BrandingText "Tandem ${VERSION}"
OutFile "${OUT}"
InstallDir "$LOCALAPPDATA\Programs\Tandem"
InstallDirRegKey HKCU "${OWN_KEY}" "Folder"

VIProductVersion "${VERSION_NUMBERS}"
VIAddVersionKey "ProductName" "Tandem"
VIAddVersionKey "ProductVersion" "${VERSION}"
VIAddVersionKey "FileVersion" "${VERSION}"
VIAddVersionKey "FileDescription" "Installs Tandem"
VIAddVersionKey "LegalCopyright" "The Tandem authors, MIT license"

!define MUI_ICON "${ICON}"
!define MUI_UNICON "${ICON}"
!define MUI_COMPONENTSPAGE_SMALLDESC
!define MUI_FINISHPAGE_RUN "$INSTDIR\Tandem.exe"
!define MUI_FINISHPAGE_NOREBOOTSUPPORT

!insertmacro MUI_PAGE_COMPONENTS
!define MUI_PAGE_CUSTOMFUNCTION_LEAVE CheckFolder
!insertmacro MUI_PAGE_DIRECTORY
!insertmacro MUI_PAGE_INSTFILES
!insertmacro MUI_PAGE_FINISH
!insertmacro MUI_UNPAGE_COMPONENTS
!insertmacro MUI_UNPAGE_INSTFILES

!insertmacro MUI_LANGUAGE "English"
!insertmacro MUI_LANGUAGE "German"
!include texts.nsh

; ---------------------------------------------------------------- what is running, what is there

; Sets $R0 to 1 while a process has the Python of the installed Tandem loaded, else to 0.
!macro IN_USE un
Function ${un}IsInUse
    StrCpy $R0 0
    FindFirst $R1 $R2 "$INSTDIR\python\python3*.dll"
    ${DoWhile} $R2 != ""
        ClearErrors
        FileOpen $R3 "$INSTDIR\python\$R2" a
        ${If} ${Errors}
            StrCpy $R0 1
        ${Else}
            FileClose $R3
        ${EndIf}
        FindNext $R1 $R2
    ${Loop}
    FindClose $R1
FunctionEnd

; Asks whether Tandem may be closed, and closes its window; ends the setup where that is not possible.
Function ${un}CloseTandem
    Call ${un}IsInUse
    ${If} $R0 = 0
        Return
    ${EndIf}
    MessageBox MB_OKCANCEL|MB_ICONEXCLAMATION $(IsOpen) /SD IDOK IDOK close
    SetErrorLevel 3
    Quit
close:
    nsExec::Exec '"$INSTDIR\bin\tandem.exe" --quit'
    Pop $R4
    StrCpy $R4 0
    ${Do}
        Call ${un}IsInUse
        ${If} $R0 = 0
            Return
        ${EndIf}
        Sleep 500
        IntOp $R4 $R4 + 1
    ${LoopUntil} $R4 > 20
    MessageBox MB_RETRYCANCEL|MB_ICONSTOP $(IsStillOpen) /SD IDCANCEL IDRETRY close
    SetErrorLevel 3
    Quit
FunctionEnd

; Deletes the program and nothing else, as the folder may hold files of the person.
Function ${un}DeleteProgram
    RMDir /r "$INSTDIR\python"
    RMDir /r "$INSTDIR\site"
    RMDir /r "$INSTDIR\src"
    RMDir /r "$INSTDIR\bin"
    Delete "$INSTDIR\Tandem.exe"
    Delete "$INSTDIR\LICENSE.txt"
    Delete "$INSTDIR\LICENCES.txt"
FunctionEnd
!macroend
!insertmacro IN_USE ""
!insertmacro IN_USE "un."

; Refuses folders that hold something else, and those whose files Windows could not name.
Function CheckFolder
    StrLen $R0 $INSTDIR
    IntOp $R0 $R0 + ${LONGEST}
    ${If} $R0 > ${USUAL_LONGEST}
        MessageBox MB_OK|MB_ICONSTOP $(TooLong) /SD IDOK
        Abort
    ${EndIf}
    Call IsForeign
    ${If} $R0 = 1
        MessageBox MB_OK|MB_ICONSTOP $(IsForeignText) /SD IDOK
        Abort
    ${EndIf}
FunctionEnd

; Sets $R0 to 1 if the folder holds files but no Tandem.
Function IsForeign
    StrCpy $R0 0
    ${If} ${FileExists} "$INSTDIR\uninstall.exe"
    ${AndIf} ${FileExists} "$INSTDIR\bin\tandem.exe"
        Return
    ${EndIf}
    ${DirState} "$INSTDIR" $R1
    ${If} $R1 = 1
        StrCpy $R0 1
    ${EndIf}
FunctionEnd

; ---------------------------------------------------------------- install

Section "Tandem" SecTandem
    SectionIn RO
    Call IsForeign ; a silent setup has asked nobody
    StrLen $R1 $INSTDIR
    IntOp $R1 $R1 + ${LONGEST}
    ${If} $R0 = 1
    ${OrIf} $R1 > ${USUAL_LONGEST}
        SetErrorLevel 4
        Quit
    ${EndIf}
    Call CloseTandem
    Call DeleteProgram
    SetOutPath "$INSTDIR"
    File /r "${TREE}/*"
    WriteUninstaller "$INSTDIR\uninstall.exe"
    CreateShortcut "$SMPROGRAMS\Tandem.lnk" "$INSTDIR\Tandem.exe"

    WriteRegStr HKCU "${OWN_KEY}" "Folder" "$INSTDIR"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "DisplayName" "Tandem"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "DisplayVersion" "${VERSION}"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "DisplayIcon" "$INSTDIR\Tandem.exe"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "Publisher" "The Tandem authors"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "InstallLocation" "$INSTDIR"
    WriteRegStr HKCU "${UNINSTALL_KEY}" "UninstallString" '"$INSTDIR\uninstall.exe"'
    WriteRegStr HKCU "${UNINSTALL_KEY}" "QuietUninstallString" '"$INSTDIR\uninstall.exe" /S'
    WriteRegDWORD HKCU "${UNINSTALL_KEY}" "EstimatedSize" ${KIB}
    WriteRegDWORD HKCU "${UNINSTALL_KEY}" "NoModify" 1
    WriteRegDWORD HKCU "${UNINSTALL_KEY}" "NoRepair" 1

    ; Tandem is offered for model files, whoever opens them
    WriteRegStr HKCU "${CLASSES}\${PROG_ID}" "" $(FileType)
    WriteRegStr HKCU "${CLASSES}\${PROG_ID}\DefaultIcon" "" "$INSTDIR\Tandem.exe,0"
    WriteRegStr HKCU "${CLASSES}\${PROG_ID}\shell\open\command" "" '"$INSTDIR\Tandem.exe" "%1"'
    WriteRegStr HKCU "${CLASSES}\.gguf\OpenWithProgids" "${PROG_ID}" ""
    WriteRegStr HKCU "${OWN_KEY}\Capabilities" "ApplicationName" "Tandem"
    WriteRegStr HKCU "${OWN_KEY}\Capabilities" "ApplicationDescription" $(About)
    WriteRegStr HKCU "${OWN_KEY}\Capabilities\FileAssociations" ".gguf" "${PROG_ID}"
    WriteRegStr HKCU "Software\RegisteredApplications" "Tandem" "${OWN_KEY}\Capabilities"
    WriteRegStr HKCU "Software\Microsoft\Windows\CurrentVersion\App Paths\Tandem.exe" "" "$INSTDIR\Tandem.exe"

    Call CheckStart
SectionEnd

Section $(GgufName) SecGguf
    WriteRegStr HKCU "${CLASSES}\.gguf" "" "${PROG_ID}"
SectionEnd

Section /o $(DesktopName) SecDesktop
    CreateShortcut "$DESKTOP\Tandem.lnk" "$INSTDIR\Tandem.exe"
SectionEnd

Section "-end"
    ${RefreshShellIcons}
SectionEnd

Function .onInit
    ${IfNot} ${AtLeastWin10}
    ${OrIfNot} ${AtLeastBuild} ${LEAST_BUILD}
        MessageBox MB_OK|MB_ICONSTOP $(TooOld) /SD IDOK
        SetErrorLevel 2
        Quit
    ${EndIf}
    Call ChooseGguf
FunctionEnd

; Files of another program stay its own, unless the person ticks the box.
Function ChooseGguf
    ReadRegStr $R0 HKCU "${CLASSES}\.gguf" ""
    ${If} $R0 == ""
        ReadRegStr $R0 HKCR ".gguf" ""
    ${EndIf}
    ReadRegStr $R1 HKCU "Software\Microsoft\Windows\CurrentVersion\Explorer\FileExts\.gguf\UserChoice" "ProgId"
    ${If} $R0 == "${PROG_ID}"
        StrCpy $R0 ""
    ${EndIf}
    ${If} $R1 == "${PROG_ID}"
        StrCpy $R1 ""
    ${EndIf}
    ${If} "$R0$R1" != ""
        !insertmacro UnselectSection ${SecGguf}
    ${EndIf}
FunctionEnd

; The runtime of Visual C++ comes along; whether it and Python start here, only starting them tells.
Function CheckStart
    nsExec::ExecToStack '"$INSTDIR\bin\tandem.exe" --quit' ; it loads Qt, and no window is open
    Pop $R0
    Pop $R1
    ${If} $R0 == "0"
        Return
    ${EndIf}
    DetailPrint "tandem.exe --quit: $R0 $R1"
    MessageBox MB_YESNO|MB_ICONEXCLAMATION $(DoesNotStart) /SD IDNO IDNO done
    ExecShell "open" "${RUNTIME_URL}"
done:
    SetErrorLevel 5
FunctionEnd

!insertmacro MUI_FUNCTION_DESCRIPTION_BEGIN
    !insertmacro MUI_DESCRIPTION_TEXT ${SecTandem} $(TandemText)
    !insertmacro MUI_DESCRIPTION_TEXT ${SecGguf} $(GgufText)
    !insertmacro MUI_DESCRIPTION_TEXT ${SecDesktop} $(DesktopText)
!insertmacro MUI_FUNCTION_DESCRIPTION_END

; ---------------------------------------------------------------- uninstall

Section "un.Tandem" UnTandem
    SectionIn RO
    Call un.CloseTandem
    Call un.DeleteProgram
    Delete "$INSTDIR\uninstall.exe"
    RMDir "$INSTDIR" ; only if it is empty
    Delete "$SMPROGRAMS\Tandem.lnk"
    Delete "$DESKTOP\Tandem.lnk"
    ReadRegStr $R0 HKCU "${CLASSES}\.gguf" ""
    ${If} $R0 == "${PROG_ID}"
        DeleteRegValue HKCU "${CLASSES}\.gguf" ""
    ${EndIf}
    DeleteRegValue HKCU "${CLASSES}\.gguf\OpenWithProgids" "${PROG_ID}"
    DeleteRegKey /ifempty HKCU "${CLASSES}\.gguf\OpenWithProgids"
    DeleteRegKey /ifempty HKCU "${CLASSES}\.gguf"
    DeleteRegKey HKCU "${CLASSES}\${PROG_ID}"
    DeleteRegValue HKCU "Software\RegisteredApplications" "Tandem"
    DeleteRegKey HKCU "Software\Microsoft\Windows\CurrentVersion\App Paths\Tandem.exe"
    DeleteRegKey HKCU "${UNINSTALL_KEY}"
    DeleteRegKey HKCU "${OWN_KEY}"
    ${RefreshShellIcons}
SectionEnd

Section /o "un.$(EngineName)" UnEngine
    RMDir /r "$LOCALAPPDATA\Tandem\engines"
SectionEnd

Function un.onInit
    ${GetParameters} $R0
    ClearErrors
    ${GetOptions} $R0 "/ENGINE" $R1
    ${IfNot} ${Errors}
        !insertmacro SelectSection ${UnEngine}
    ${EndIf}
FunctionEnd

!insertmacro MUI_UNFUNCTION_DESCRIPTION_BEGIN
    !insertmacro MUI_DESCRIPTION_TEXT ${UnTandem} $(UnTandemText)
    !insertmacro MUI_DESCRIPTION_TEXT ${UnEngine} $(EngineText)
!insertmacro MUI_UNFUNCTION_DESCRIPTION_END
